"""Write the result tables to files of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from kproxy.errors import StartupError
from kproxy.pipeline.audit.columns import TABLES, arrow_schema
from kproxy.pipeline.audit.steps import Results


def write_tables(results: Results, directory: str, about: Mapping[str, str]) -> None:
    """Write a directory of Parquet for each table, replacing earlier ones. Raise StartupError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise StartupError(
            "--output writes Parquet files, with pyarrow: pip install 'kproxy-kafka[parquet]'."
        ) from error
    try:
        for name, rows in results.tables(about):
            place = Path(directory, name)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            table = pa.Table.from_pylist(list(rows), arrow_schema(TABLES[name]))
            parquet.write_table(table, place / "part-00000.parquet")
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(f"The audit's results could not be written to {directory}: {reason}.") from error

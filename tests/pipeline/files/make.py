"""Write the files beside this script: the table of test_ingest_files as Polars and DuckDB write it.

    pip install polars duckdb pyarrow && python tests/pipeline/files/make.py

Both libraries are large, and nothing else here needs them.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("id", "name", "amount", "price", "day", "at", "ok")
AT = datetime(2026, 1, 2, 3, 4, 5, 123456, UTC)
ROWS: list[tuple[Any, ...]] = [
    (1, "plain", 1.5, Decimal("1.25"), date(2026, 1, 2), AT, True),
    (2, 'say "hi", ✓\nnext', -0.1, Decimal("-0.01"), date(1969, 12, 31), AT.replace(microsecond=0), False),
    (3, None, None, None, None, None, None),
    (4, "", 1e300, Decimal("9999.99"), date(2026, 1, 2), AT, True),
]


def main() -> None:
    import duckdb
    import polars

    kinds = {"price": polars.Decimal(6, 2), "at": polars.Datetime("us", "UTC")}
    frame = polars.DataFrame(ROWS, schema=NAMES, schema_overrides=kinds, orient="row")
    frame.write_csv(HERE / "polars.csv")
    frame.write_ndjson(HERE / "polars.json")
    frame.write_parquet(HERE / "polars.parquet")
    base = duckdb.connect()
    base.execute("SET TimeZone = 'UTC'")
    types = ("BIGINT", "VARCHAR", "DOUBLE", "DECIMAL(6,2)", "DATE", "TIMESTAMPTZ", "BOOL")
    columns = ", ".join(f'"{name}" {kind}' for name, kind in zip(NAMES, types, strict=True))
    base.execute(f"CREATE TABLE t ({columns})")
    base.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?, ?, ?)", ROWS)
    for kind in ("csv", "json", "parquet"):
        base.execute(f"COPY t TO '{HERE}/duckdb.{kind}' (FORMAT {kind}{', HEADER' if kind == 'csv' else ''})")


if __name__ == "__main__":
    main()

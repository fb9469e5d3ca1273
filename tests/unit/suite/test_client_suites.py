"""What scripts/client_suites.py reads from the output of other clients' suites."""

from pathlib import Path

from scripts.client_suites import outcomes


def written(directory: Path, **files: str) -> dict[str, str]:
    for name, text in {"stdout": "", **files}.items():
        (directory / name).write_text(text)
    return dict(outcomes(directory))


def test_outcome_of_failed_teardown_replaces_passed(tmp_path: Path) -> None:
    text = "a.py::test[a\tb]\tpassed\na.py::other\tskipped\na.py::test[a\tb]\tfailed\n"
    assert written(tmp_path, outcomes=text) == {"a.py::test[a\tb]": "failed", "a.py::other": "skipped"}


def test_go_tests_stand_beside_other_output(tmp_path: Path) -> None:
    text = """\
go: downloading a module
{"Time":"2026","Action":"run","Test":"TestA/b"}
{"Time":"2026","Action":"output","Test":"TestA/b","Output":"ok"}
{"Time":"2026","Action":"fail","Test":"TestA/b"}
{"Time":"2026","Action":"pass","Test":"TestC"}
{"Time":"2026","Action":"fail"}
"""
    assert written(tmp_path, stdout=text) == {"TestA/b": "failed", "TestC": "passed"}


def test_librdkafka_tests_without_whole_report_fail(tmp_path: Path) -> None:
    report = (
        '{"tests": {"<MAIN>": {"state": "PASSED"}, "0001_a": {"state": "PASSED"}, "0002_b": {"state": "SKIPPED"}}}\n'
    )
    files = {
        "0001.log": "",
        "0001.json": report,
        "0002.log": "",
        "0002.json": report[:40],
        "0003.log": "[0003_c / 0.1s] begins\n",
    }
    assert written(tmp_path, **files) == {"0001_a": "passed", "0002": "failed", "0003_c": "failed"}

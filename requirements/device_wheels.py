"""Wheels for a GPU machine without a package index: `python requirements/device_wheels.py [PIECE
...]`.

Downloads the pins of requirements/device.txt for Python 3.12 on x86-64 and writes each piece to
wheels/device/PIECE, none above 58 MiB, so that a piece and the source tree fit into one transfer of
64 MiB. `te --python PYTHON` also compiles transformer-engine-torch into piece d; PYTHON is a Python
3.12 that has torch 2.11.0+cu130. Needs the standard library and pip alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 58 << 20
FIRST = ("a", "b", "c", "e")
CUT = {"te": ("te1", "te2", "te3"), "e": ("e1", "e2")}  # whose largest wheel fills more than one
# a platform tag is matched exactly: wheels name the oldest C library that they run on
PLATFORMS = [
    *(f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
]
ONLY_SOURCE = {"antlr4-python3-runtime"}  # pure Python, but published as source
BUILT = {"transformer-engine-torch"}
# parts of a wheel that the checks never load
LEFT_OUT = {
    "ray": ("ray/jars/", "ray/dashboard/client/", "ray/rllib/"),
    "sglang": ("rust_extensions/_bench", "rust_extensions/_multimodal", "multimodal_gen/"),
    "sglang-kernel": ("flash_ops", "sm100/", "infllm_ops", "flashmla_ops"),
}
# headers that compiling Transformer Engine's part for torch needs and torch's own wheels lack
CUDA_HEADERS = (
    *("nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85"),
    *("nvidia-cuda-nvcc==13.0.88", "nvidia-nvvm==13.0.88"),
)


def pins(lock: Path = HERE / "device.txt") -> dict[str, list[str]]:
    """`name==version` lines by piece; e1 and e2 are the piece `e`, te1 to te3 `te`."""
    found: dict[str, list[str]] = {}
    piece = ""
    for line in lock.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"# pieces? (te|\w)", line):
            piece = heading[1]
        elif "==" in line and not line.startswith("#"):
            found.setdefault(piece, []).append(line)
    return found


def name_of(pin: str) -> str:
    """The distribution's name as wheels' file names spell it, with hyphens."""
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


def pip(*words: str, python: str = sys.executable, env: dict[str, str] | None = None) -> None:
    """Run pip; raises SystemExit with its last words where it fails."""
    done = subprocess.run(
        [python, "-m", "pip", *words, "-q", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    if done.returncode:
        raise SystemExit(f"gpu-wheels: pip {words[0]} failed: {done.stderr.strip()[-1500:]}")


def download(wanted: Sequence[str], folder: Path) -> None:
    """The wheels of these pins, as a machine with Python 3.12 would choose them."""
    binary = [pin for pin in wanted if name_of(pin) not in ONLY_SOURCE | BUILT]
    tags = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *tags]
    pip("download", "--no-deps", *target, "-d", str(folder), *binary)
    for pin in wanted:
        if name_of(pin) in ONLY_SOURCE:
            pip("wheel", "--no-deps", "-w", str(folder), pin)


def slim(wheel: Path, left_out: Sequence[str]) -> None:
    """Rewrite a wheel without the files whose path contains one of these words. Its RECORD still
    lists them, which installing does not mind."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            if not any(word in item.filename for word in left_out):
                new.writestr(item, old.read(item.filename))
    smaller.replace(wheel)


def cut(wheel: Path, folders: Sequence[Path]) -> None:
    """Cut a file into as many parts, each in a folder of its own; `cat */NAME.part*` joins them
    again."""
    size = -(-wheel.stat().st_size // len(folders))
    with wheel.open("rb") as whole:
        for number, folder in enumerate(folders):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{wheel.name}.part{number}").write_bytes(whole.read(size))


def make(piece: str, out: Path) -> list[Path]:
    """Download one piece; returns its folders."""
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        raw = Path(temporary)
        download(pins()[piece], raw)
        for wheel in raw.glob("*.whl"):
            name = wheel.name.partition("-")[0].replace("_", "-").lower()
            if name in LEFT_OUT:
                slim(wheel, LEFT_OUT[name])
        folders = [out / part for part in CUT.get(piece, (piece,))]
        for folder in folders:
            if piece != "d":  # which keeps what was compiled
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        wheels = sorted(raw.glob("*.whl"), key=lambda wheel: wheel.stat().st_size)
        if piece in CUT:
            cut(wheels.pop(), folders)
        for wheel in wheels:
            shutil.move(wheel, folders[0] / wheel.name)
    return folders


def compile_te(python: str, out: Path) -> Path:
    """Compile transformer-engine-torch, which is C++ without kernels and so needs headers, but no
    GPU and no nvcc."""
    if not Path(python).is_file():
        raise SystemExit(
            f"gpu-wheels: --python {python!r} does not exist; give a Python 3.12 with torch==2.11.0"
        )
    asked = [
        python,
        "-c",
        "import site, torch; print(site.getsitepackages()[0]); print(torch.__version__)",
    ]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    packages, _, version = said.stdout.strip().partition("\n")
    if not version.startswith("2.11.0"):
        reason = f"has torch {version}" if version else said.stderr.strip()[-300:]
        raise SystemExit(f"gpu-wheels: {python} must have torch 2.11.0+cu130; {reason}")
    site = Path(packages)
    folder = out / "d"
    with tempfile.TemporaryDirectory() as temporary:
        cuda = Path(temporary, "cuda")
        pip("download", "--no-deps", "-d", temporary, *CUDA_HEADERS, python=python)
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                # `extractall` drops the mode, and nvcc is asked for its version
                for item in archive.infolist():
                    Path(archive.extract(item, Path(temporary, "headers"))).chmod(0o755)
        for source in (site / "nvidia/cu13", Path(temporary, "headers/nvidia/cu13")):
            shutil.copytree(
                source,
                cuda,
                symlinks=True,
                dirs_exist_ok=True,
                copy_function=os.symlink,
                ignore=_present(source, cuda),
            )
        includes = [
            cuda / "include",
            cuda / "include/cccl",
            site / "nvidia/cudnn/include",
            site / "nvidia/nccl/include",
        ]
        env = {
            **os.environ,
            "CUDA_HOME": str(cuda),
            "CPATH": ":".join(map(str, includes)),
            "NVTE_FRAMEWORK": "pytorch",
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
            "MAX_JOBS": os.environ.get("MAX_JOBS", "2"),
        }
        (pin,) = (pin for pin in pins()["d"] if name_of(pin) in BUILT)
        pip(
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            pin,
            python=python,
            env=env,
        )
    return folder


def _present(source: Path, target: Path):  # type: ignore[no-untyped-def]
    """For `copytree`: leave out files that are there already."""

    def names(folder: str, entries: list[str]) -> list[str]:
        there = target / Path(folder).relative_to(source)
        return [entry for entry in entries if (there / entry).is_file()]

    return names


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a piece is larger than one transfer."""
    parser = argparse.ArgumentParser(
        prog="make gpu-wheels",
        description="wheels for a GPU machine without an index",
        allow_abbrev=False,
    )
    parser.add_argument(
        "pieces",
        nargs="*",
        default=list(FIRST),
        help=f"of {', '.join(pins())}; a b c e unless named",
    )
    parser.add_argument(
        "--python", default="", help="for te: a Python 3.12 with torch 2.11.0+cu130"
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "wheels/device")
    wishes = parser.parse_args(words)
    if unknown := [piece for piece in wishes.pieces if piece not in pins()]:
        parser.error(f"no piece {', '.join(unknown)}; there are {', '.join(pins())}")
    wishes.out.mkdir(parents=True, exist_ok=True)
    large = False
    for piece in wishes.pieces:
        folders = make(piece, wishes.out)
        if piece == "te" and wishes.python:
            folders.append(compile_te(wishes.python, wishes.out))
        for folder in folders:
            size = sum(file.stat().st_size for file in folder.iterdir())
            large |= size > LIMIT
            print(
                f"{folder}: {len(list(folder.iterdir()))} files, {size / 2**20:.1f} MiB", flush=True
            )
    if large:
        print(f"gpu-wheels: a piece is larger than {LIMIT >> 20} MiB", file=sys.stderr)
    return int(large)


if __name__ == "__main__":
    sys.exit(main())

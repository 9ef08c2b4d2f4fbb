"""Parts of the site from registries, each pinned by version and hash, and kept in a folder between builds."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from shardwise.errors import MachineError, UserError

PYODIDE = (
    "pyodide@314.0.7",
    "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
)
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PLATFORM = ("--platform=pyemscripten_2026_0_wasm32", "--platform=any", "--python-version=314", "--implementation=cp")
WHEELS = """\
annotated-types==0.8.0 --hash=sha256:f072f4d804ea359e4eaf198b1af7a8b0943881a87f31bb764f8bf219bb9419e0
pydantic==2.14.3 --hash=sha256:3f7b347782ab7e4cf4c798496ae3a82787d9f21ec12676a9c564355eeef8daa8
pydantic-core==2.50.4 --hash=sha256:e6da138a1ecc1341c8b788a5ee822670b03788e1f5decf7af9d461de6e508b8e
tomli-w==1.2.0 --hash=sha256:188306098d013b691fcadc011abd66727d3c414c571bb01b1a174ba8c983cf90
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
typing-inspection==0.4.5 --hash=sha256:bc210535442b39e1bf2805e0c7a17dfd6a4ace760c84c7f7d16245d23a6b1c39
"""
WAIT_S = 300


def npm_package(package: str, integrity: str, cache: Path) -> Path:
    """Return the tarball of an npm package such as ``pyodide@314.0.7``, checked against its ``sha512-`` integrity.

    Raises:
        UserError: npm is missing.
        MachineError: it cannot be downloaded, or is not what was pinned.
    """
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / f"{package.replace('@', '-').replace('/', '-')}.tgz"
    if not kept.is_file():
        if shutil.which("npm") is None:
            raise UserError(
                f"{package} comes from the npm registry, and npm is not installed; install Node.js with npm"
            )
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _run(["npm", "pack", "--silent", "--pack-destination", folder, package], f"npm cannot download {package}")
            next(Path(folder).glob("*.tgz")).rename(kept)
    found = "sha512-" + base64.b64encode(hashlib.sha512(kept.read_bytes()).digest()).decode()
    if found != integrity:
        kept.unlink()
        raise MachineError(f"{package}: its hash is {found:.24}…, and {integrity:.24}… is pinned; nothing was unpacked")
    return kept


def unpack_npm(tarball: Path, names: tuple[str, ...], folder: Path) -> None:
    """Write the named files of an npm tarball to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(tarball) as archive:
        for name in names:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise MachineError(f"'{tarball}' has no file {name}")
            (folder / name).write_bytes(member.read())


def wheels(cache: Path) -> list[Path]:
    """Return the wheels that the engine imports under Pyodide; pip checks their hashes.

    Raises:
        MachineError: they cannot be downloaded, or are not what was pinned.
    """
    folder = cache / f"wheels-{hashlib.sha256(WHEELS.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            listed = Path(made) / "wheels.txt"
            listed.write_text(WHEELS)
            target = Path(made) / "wheels"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            pip += ["--only-binary=:all:", "--require-hashes", *PLATFORM, f"--dest={target}", f"--requirement={listed}"]
            _run(pip, "pip cannot download the wheels for the browser")
            target.rename(folder)
    return sorted(folder.glob("*.whl"))


def precompile(engine: Path, archive: Path) -> None:
    """Compile the Python files of an archive by the browser's own Python, which halves the time until it answers.

    Raises:
        UserError: Node.js is missing.
    """
    if shutil.which("node") is None:
        raise UserError("the engine is compiled by Node.js, which is not installed; install it with npm")
    script = Path(__file__).with_name("precompile.mjs")
    _run(["node", str(script), str(engine.resolve()), str(archive.resolve())], "Node.js cannot compile the engine")


def _run(command: list[str], failure: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        raise MachineError(f"{failure}: no answer in {WAIT_S} s; try again") from None
    if done.returncode:
        raise MachineError(f"{failure}: {(done.stderr or done.stdout).strip()[-600:]}")

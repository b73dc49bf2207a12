"""Marked secrets everywhere, and none of them where a person, a log or a process list shows it."""

import base64
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from blocks.secrets import EngineSecrets, SSHCredentials
from tests.lab.command import run as run_program
from tests.lab.flow_runs import FlowRuns
from tests.lab.prefect_processes import Processes
from tests.lab.product import DONE, FAILED, Product

pytestmark = [pytest.mark.lab, pytest.mark.extended]
BLOCK = "marked"


@dataclass(frozen=True)
class Marks:
    """What may show nowhere, by what it is."""

    of: Mapping[str, str]

    @property
    def forms(self) -> dict[bytes, str]:
        """Each as it is, and as it is in base64, in which our commands travel."""
        found = {}
        for name, value in self.of.items():
            found[value.encode()] = name
            for shift in range(3):
                coded = base64.b64encode(b"x" * shift + value.encode())
                found[coded[4 : len(coded) - 4]] = f"{name} in base64"
        return found

    def in_(self, content: bytes) -> set[str]:
        return {name for form, name in self.forms.items() if form in content}


@pytest.fixture(scope="module")
def marks(stub: Product, tmp_path_factory: pytest.TempPathFactory) -> Marks:
    """Every kind of secret that there is; the key is the lab's own, with a passphrase."""
    passphrase = secrets.token_hex(8)
    key = tmp_path_factory.mktemp("key") / "key"
    shutil.copy(stub.lab.key_file, key)
    run_program(["ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", str(key)])
    values = {name: secrets.token_hex(12) for name in ("API key", "hub token", "variable")}
    text = key.read_text()
    key.unlink()
    body = text.splitlines()[3]
    return Marks({**values, "passphrase": passphrase, "SSH key": body, "whole key": text})


@pytest.fixture(scope="module")
def marked(stub: Product, tmp_path_factory: pytest.TempPathFactory) -> Product:
    """The cluster with all of them."""

    def change(document: dict[str, Any]) -> None:
        del document["ssh"]["key_file"]
        document["ssh"]["credentials"] = document["secrets"] = BLOCK

    return stub.but(tmp_path_factory.mktemp("marked"), change)


def save(prefect: Processes, marks: Marks) -> None:
    with temporary_settings({PREFECT_API_URL: f"{prefect.ui}/api"}):
        SSHCredentials(
            private_key=marks.of["whole key"], passphrase=marks.of["passphrase"], use_agent=False
        ).save(BLOCK, overwrite=True)
        EngineSecrets(
            api_key=marks.of["API key"],
            hub_token=marks.of["hub token"],
            environment={"SITE_PASSWORD": marks.of["variable"]},
        ).save(BLOCK, overwrite=True)


class ProcessList:
    """What `ps` shows on this machine, and so on all nodes, looked at again and again."""

    def __init__(self, forms: Mapping[bytes, str]) -> None:
        self.seen: set[str] = set()
        self.looks = 0
        self._forms = forms
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.looks += 1
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes()
                except OSError:
                    continue
                self.seen |= {
                    f"{name}: {words!r}" for form, name in self._forms.items() if form in words
                }


ASK = """\
read -r KEY; export KEY
python3 - <<'END'
import os, urllib.error, urllib.request
for key in ("", os.environ["KEY"]):
    asked = urllib.request.Request("http://127.0.0.1:{port}/v1/models")
    asked.add_header("Authorization", f"Bearer {key}")
    try:
        print(urllib.request.urlopen(asked, timeout=30).status)
    except urllib.error.HTTPError as error:
        print(error.code)
END
"""


def statuses(product: Product, key: str) -> list[str]:
    """What the endpoint answers without and with the key, which goes by standard input."""
    script = ASK.replace("{port}", str(product.document["serve"]["port"]))
    return product.on("head", script, f"{key}\n".encode()).split()


def test_no_secret_shows(marked: Product, marks: Marks, prefect: Processes, runs: FlowRuns) -> None:
    save(prefect, marks)
    marked.write()
    listed = ProcessList(marks.forms)
    with listed.watched():
        passed = runs.ended(runs.start(cluster=str(marked.spec)))
        assert passed.state == "Changed", passed.message
        inspected = inspect(marked)
        assert statuses(marked, marks.of["API key"]) == ["401", "200"]
        looked = marked.start("status", prefect=prefect.environment).wait()
        assert looked.code == DONE, looked.error

        # One that prints all that it knows, and fails.
        failing = marked.but(marked.folder, tell_and_fail)
        failing.write()
        failed = runs.ended(runs.start(cluster=str(marked.spec)))
        assert failed.state == "RolledBack"
        assert "SITE_PASSWORD" in failed.message
        assert "***" in failed.message
        inspected += inspect(marked)
        again = failing.start("deploy", "--force", prefect=prefect.environment).wait()
        assert again.code == FAILED
        assert "SITE_PASSWORD" in again.error
    assert listed.looks > 10
    assert listed.seen == set()
    assert marks.in_(inspected.encode()) == set()
    assert shown_in(marks, prefect.home) == {}
    assert shown_in(marks, marked.folder) == {}


def tell_and_fail(document: dict[str, Any]) -> None:
    document["environment"]["STUB_TELL"] = "1"
    document["serve"]["arguments"] = ["--max-model-len=999999"]


def inspect(product: Product) -> str:
    """All containers of all nodes, as docker tells of them."""
    everything = "docker ps --all --quiet | xargs docker inspect"
    return "".join(product.on(name, everything) for name in product.nodes)


def shown_in(marks: Marks, folder: Path) -> dict[str, set[str]]:
    """The files of a folder that give something away: database, logs, what was printed."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(file): found for file in files if (found := marks.in_(file.read_bytes()))}

"""The systemd units and their settings: well-formed, and of names that exist."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import prefect.settings
import pytest

FOLDER = Path(__file__).parents[2] / "deployments" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
SETTING = re.compile(r"#?(PREFECT_[A-Z_]+)=(\S+)")


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        say = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        say("NO systemd-analyze: the units are not checked; apt-get install systemd")
    for unit in UNITS:
        text = unit.read_text().replace("/srv/sparkrail/.venv/bin/prefect", sys.executable)
        (tmp_path / unit.name).write_text(text)
    copies = [str(tmp_path / unit.name) for unit in UNITS]
    said = subprocess.run(["systemd-analyze", "verify", *copies], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_service_is_stopped_by_one_signal(unit: Path) -> None:
    """Prefect takes the second for a SIGKILL."""
    lines = unit.read_text().splitlines()
    assert {"KillMode=mixed", "KillSignal=SIGTERM"} <= set(lines)


def test_every_setting_is_one_of_prefect_s() -> None:
    for line in (FOLDER / "prefect.env").read_text().splitlines():
        setting = SETTING.fullmatch(line)
        assert setting or not line or line.startswith("# "), line
        assert setting is None or hasattr(prefect.settings, setting[1]), line

"""The relayed look at GPU holders: what nvidia-smi prints, and what /proc tells beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import CommandFailed
from tasks.gpu_looks import Look, parse_look
from tasks.relayed import gpu_holders as relay

SCRIPT = Path(relay.__file__)
DATA = Path(__file__).parent / "data" / "nvidia-smi"
GPU = "GPU-96e89a29-8e0a-9f46-9b9a-e458d6afae9f"


@pytest.mark.parametrize(
    ("text", "found", "odd"),
    [
        pytest.param(f"{GPU}, 4242, VLLM::Worker_TP0, 95245", [(4242, 95245)], "", id="a GB10"),
        pytest.param(f"{GPU}, 7, python3, a, b, c, 12", [(7, 12)], "", id="commas in the name"),
        pytest.param(f"{GPU}, 7, [Not Found], 12", [(7, 12)], "", id="a name that is not found"),
        pytest.param(f"{GPU}, 7, python3, [N/A]", [(7, None)], "", id="no number: not 0"),
        pytest.param(f"{GPU}, 7, python3, [Not Supported]", [(7, None)], "", id="not supported"),
        pytest.param(f"{GPU}, 7, python3, 12 MiB", [(7, 12)], "", id="with a unit"),
        pytest.param(
            f"{GPU}, 7, a, 1\nGPU-2, 7, a, 2", [(7, 1), (7, 2)], "", id="one pid on two GPUs"
        ),
        pytest.param(
            "MIG-41b3dd4b-7fa4-5d5a-9d3c-2f0e6d1a0d4e, 7, a, [N/A]", [(7, None)], "", id="MIG"
        ),
        pytest.param("", [], "", id="nobody"),
        pytest.param("No running processes found", [], "", id="nobody, in words"),
        pytest.param(
            "Unable to determine the device handle for GPU0: Unknown Error",
            [],
            "nvidia-smi: no row: Unable to determine the device handle for GPU0: Unknown Error",
            id="text instead of rows",
        ),
        pytest.param(
            f"{GPU}, 7, a, 1\nWARNING: infoROM is corrupted",
            [(7, 1)],
            "nvidia-smi: no row: WARNING: infoROM is corrupted",
            id="text beside rows",
        ),
    ],
)
def test_rows(text: str, found: list[tuple[int, int | None]], odd: str) -> None:
    rows, said = relay.rows(text)
    assert [(each["pid"], each["used_mib"]) for each in rows] == found
    assert said == odd


@pytest.mark.parametrize(
    ("line", "memory"),
    [
        pytest.param(f"0, {GPU}, [N/A], [N/A], [N/A], [N/A]", (None, None, None, False), id="GB10"),
        pytest.param(
            f"0, {GPU}, 143771, 12508, 130653, Disabled", (143771, 12508, 130653, False), id="H200"
        ),
        pytest.param(
            f"0, {GPU}, 81920, 5, 81915, Enabled", (81920, 5, 81915, True), id="MIG is on"
        ),
        pytest.param(f"0, {GPU}", (None, None, None, False), id="asked for nothing more"),
    ],
)
def test_gpus(line: str, memory: tuple[int | None, int | None, int | None, bool]) -> None:
    [gpu], odd = relay.gpus(line, relay.GPU_FIELDS)
    assert (gpu["total_mib"], gpu["used_mib"], gpu["free_mib"], gpu["mig"]) == memory
    assert (gpu["uuid"], odd) == (GPU, "")


def captured(name: str) -> str:
    return (DATA / f"580.159.04-{name}").read_text()


def test_the_output_of_two_real_gpus() -> None:
    rows, odd = relay.rows(captured("apps-held.csv"))
    assert [(each["pid"], each["name"], each["used_mib"]) for each in rows] == [
        (574, "python3", 12500),
        (580, "python3", 1296),
        (575, "python3? a name? with commas", 1030),
        (580, "python3", 1296),
    ]
    assert (odd, len({each["gpu"] for each in rows})) == ("", 2)
    for name, used in (("idle", [0, 0]), ("held", [14846, 1305])):
        gpus, odd = relay.gpus(captured(f"gpus-{name}.csv"), relay.GPU_FIELDS)
        assert ([each["used_mib"] for each in gpus], odd) == (used, "")
        assert {each["total_mib"] for each in gpus} == {143771}


@pytest.mark.parametrize("name", ["no-such-field.txt", "no-devices.txt", "table.txt"])
def test_other_outputs_of_a_real_driver_hold_no_rows(name: str) -> None:
    rows, odd = relay.rows(captured(name))
    assert (rows, odd) == ([], f"nvidia-smi: no row: {captured(name).splitlines()[0].strip()}")


def test_a_text_is_no_gpu() -> None:
    assert relay.gpus("No devices were found", relay.GPU_FIELDS) == (
        [],
        "nvidia-smi: no row: No devices were found",
    )


# --- the whole program, with a stub of nvidia-smi at the process boundary ------------------------


def relayed(folder: Path, script: str = "", **wanted: Any) -> Look:
    folder.mkdir(exist_ok=True)
    if script:
        file = folder / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    said = subprocess.run(
        [sys.executable, "-IS", "-", "gpu_holders", json.dumps(wanted)],
        input=SCRIPT.read_bytes(),
        env={"PATH": str(folder)},
        capture_output=True,
        check=True,
    )
    return parse_look(json.loads(said.stdout))


def smi(gpus: str, rows: str) -> str:
    return f'case "$*" in *compute-apps*) {rows};; *) {gpus};; esac'


GB10 = f"echo '0, {GPU}, [N/A], [N/A], [N/A], [N/A]'"


def test_rows_are_joined_with_proc(tmp_path: Path) -> None:
    found = relayed(tmp_path / "bin", smi(GB10, f"echo '{GPU}, {os.getpid()}, python3, 12'"))
    own = found.process(os.getpid())
    assert own is not None
    assert own.command == " ".join(Path("/proc/self/cmdline").read_text().split("\0")[:-1])
    assert (own.parent, own.state in "RS") == (os.getppid(), True)
    assert own.started < found.ticks
    assert [each.pid for each in found.ancestors(own)][:1] == [os.getppid()]
    assert os.getpid() in found.own
    assert len(found.largest) == 5
    assert found.memory.available_mib <= found.memory.total_mib
    assert (found.rows_error, found.gpus_error) == ("", "")


def test_a_name_with_commas_is_one_row(tmp_path: Path) -> None:
    found = relayed(tmp_path / "bin", smi(GB10, f"echo '{GPU}, 99999999, a, b, 12'"))
    assert [(each.pid, each.name, each.used_mib) for each in found.rows] == [(99999999, "a, b", 12)]
    assert found.process(99999999) is None


@pytest.mark.parametrize(
    ("script", "rows_error", "gpus_error", "gpus"),
    [
        pytest.param("", *["nvidia-smi is not installed"] * 2, 0, id="not installed"),
        pytest.param(
            smi(GB10, "exec /bin/sleep 60"),
            "nvidia-smi gave no answer within 0.3 s",
            "",
            1,
            id="one query hangs",
        ),
        pytest.param(
            smi(
                'case "$*" in *memory*) echo Not Supported; exit 6;; *) echo "0, GPU-1";; esac', ":"
            ),
            "",
            "",
            1,
            id="the device query refuses the memory with exit code 6",
        ),
        pytest.param(
            smi(GB10, "echo Not Supported; exit 6"),
            "nvidia-smi: exit code 6: Not Supported",
            "",
            1,
            id="exit code 6, said on standard output",
        ),
        pytest.param(
            "echo 'NVIDIA-SMI has failed to reach the driver' >&2; exit 9",
            *["nvidia-smi: exit code 9: NVIDIA-SMI has failed to reach the driver"] * 2,
            0,
            id="exit code 9",
        ),
        pytest.param(
            "echo Failed to initialize NVML: Unknown Error",
            *["nvidia-smi: no row: Failed to initialize NVML: Unknown Error"] * 2,
            0,
            id="text and exit code 0",
        ),
    ],
)
def test_what_goes_wrong_is_told(
    tmp_path: Path, script: str, rows_error: str, gpus_error: str, gpus: int
) -> None:
    found = relayed(tmp_path / "bin", script, timeout=0.3)
    assert (found.rows_error, found.gpus_error) == (rows_error, gpus_error)
    assert (len(found.gpus), found.rows) == (gpus, ())


def test_who_has_the_gpu_open_is_told(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    sleeper = ["/bin/sh", "-c", "exec 3<$0; echo; exec /bin/sleep 60", str(device)]
    with subprocess.Popen(sleeper, stdout=subprocess.PIPE) as opener:
        assert opener.stdout and opener.stdout.readline()
        found = relayed(tmp_path / "bin", smi(GB10, ":"), devices=str(tmp_path / "nvidia"))
        opener.kill()
    assert found.openers == (opener.pid,)
    process = found.process(opener.pid)
    assert process and process.command == "/bin/sleep 60"


def test_those_with_the_same_command_are_told(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "61.5"]) as twin:
        found = relayed(tmp_path / "bin", smi(GB10, ":"), commands=["/bin/sleep 61.5"])
        twin.kill()
    assert found.process(twin.pid) is not None


def test_systemd_tells_what_it_does_when_a_unit_ends(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    systemctl = folder / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\n[ \"$*\" = '--no-ask-password show --property=Id,Restart -- a.service' ] "
        "&& printf 'Restart=always\\nId=a.service\\n'\n"
    )
    systemctl.chmod(0o755)
    text = "import json,sys; from tasks.relayed.gpu_holders import units; "
    text += "print(json.dumps(units('0::/system.slice/a.service', 5)))"
    root = Path(__file__).parents[2]
    said = subprocess.check_output(
        [sys.executable, "-c", text], env={"PATH": str(folder)}, cwd=root
    )
    assert json.loads(said) == {"a.service": "always"}


def test_something_else_than_a_look_is_refused() -> None:
    with pytest.raises(CommandFailed, match="printed something else"):
        parse_look({"user": "x"})

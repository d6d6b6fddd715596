"""When the vLLM plugin acts, and when it leaves vLLM alone. None of it needs vLLM itself."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.cases.programs import run_python
from tokenyard.integrations.vllm import plugin, settings


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info_once(self, text: str, *args: Any) -> None:
        if text % args not in self.lines:
            self.lines.append(text % args)


class CpuPlatform:
    @classmethod
    def is_cpu(cls) -> bool:
        return True

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "theirs"


class GpuPlatform(CpuPlatform):
    @classmethod
    def is_cpu(cls) -> bool:
        return False


class Fake:
    """As much of vLLM as the entry point sees."""

    def __init__(self, patch: pytest.MonkeyPatch, platform: type, version: str) -> None:
        self.log, self.installed = Log(), 0
        # A class of its own, since the plugin changes it.
        self.platform = type("Platform", (platform,), {})()
        self.expert_parallel = False
        modules = {
            "vllm": {},
            "vllm.logger": {"init_logger": lambda name: self.log},
            "vllm.platforms": {"current_platform": self.platform},
            "vllm.version": {"__version__": version},
            "vllm.config": {"get_current_vllm_config_or_none": self.config},
            "tokenyard.integrations.vllm.hooks": {"install": self.install},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            patch.setitem(sys.modules, name, module)
        hooks = sys.modules["tokenyard.integrations.vllm.hooks"]
        patch.setattr("tokenyard.integrations.vllm.hooks", hooks, raising=False)

    def config(self) -> Any:
        parallel = SimpleNamespace(enable_expert_parallel=self.expert_parallel)
        return SimpleNamespace(parallel_config=parallel)

    def install(self) -> None:
        self.installed += 1

    def communicator(self) -> str:
        return self.platform.get_device_communicator_cls()


def test_acts_on_cpus_with_expert_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, CpuPlatform, "0.32.0")
    fake.expert_parallel = True
    plugin.register()
    plugin.register()
    assert fake.installed == 0  # nothing is imported before a group is made
    assert fake.communicator() == plugin.COMMUNICATOR
    assert fake.installed == 1
    assert fake.log.lines == []


def test_leaves_vllm_alone_without_expert_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, CpuPlatform, "0.32.0")
    plugin.register()
    assert fake.communicator() == fake.communicator() == "theirs"
    assert fake.installed == 0
    assert fake.log.lines == ["tokenyard does nothing: expert parallelism is off"]


@pytest.mark.parametrize(
    "platform, version, switch, reason",
    [
        (GpuPlatform, "0.32.0", "1", "this is not the CPU platform"),
        (CpuPlatform, "0.31.3", "1", "it was tested with vLLM 0.32 up to 0.33, and this is 0.31.3"),
        (CpuPlatform, "0.33.0", "1", "it was tested with vLLM 0.32 up to 0.33, and this is 0.33.0"),
        (CpuPlatform, "dev", "1", "it was tested with vLLM 0.32 up to 0.33, and this is dev"),
        (CpuPlatform, "0.32.0", "0", "TOKENYARD_VLLM is 0"),
    ],
    ids=["gpu", "older", "newer", "unknown", "switched off"],
)
def test_says_once_why_it_does_nothing(
    monkeypatch: pytest.MonkeyPatch, platform: type, version: str, switch: str, reason: str
) -> None:
    fake = Fake(monkeypatch, platform, version)
    monkeypatch.setenv("TOKENYARD_VLLM", switch)
    fake.expert_parallel = True
    plugin.register()
    plugin.register()
    assert fake.communicator() == "theirs"
    assert fake.log.lines == [f"tokenyard does nothing: {reason}"]


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("TOKENYARD_VLLM", "TOKENYARD_VLLM_TRANSPORT", "TOKENYARD_VLLM_BALANCE")
    for name in (*ours, "TOKENYARD_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert settings.read() == settings.Settings(enabled=True, transport="auto", timeout=1800)
    monkeypatch.setenv("TOKENYARD_VLLM_TRANSPORT", "collective")
    monkeypatch.setenv("TOKENYARD_TIMEOUT", "2.5")  # which the Buffer reads
    assert settings.read() == settings.Settings(enabled=True, transport="collective", timeout=None)
    for given, want in (("exact", "exact"), ("0.05", 0.05), ("", None)):
        monkeypatch.setenv("TOKENYARD_VLLM_BALANCE", given)
        assert settings.read().balance == want
    for wrong in ("yes", "-1", "nan"):
        monkeypatch.setenv("TOKENYARD_VLLM_BALANCE", wrong)
        said = f"BALANCE is '{wrong}', want exact, or a number, the slack"
        with pytest.raises(ValueError, match=said):
            settings.read()
    monkeypatch.setenv("TOKENYARD_VLLM_TRANSPORT", "rnig")
    with pytest.raises(ValueError, match="TOKENYARD_VLLM_TRANSPORT: unknown transport 'rnig'"):
        settings.read()
    monkeypatch.setenv("TOKENYARD_VLLM", "yes")
    with pytest.raises(ValueError, match="TOKENYARD_VLLM is 'yes', want 0 or 1"):
        settings.read()


def test_the_entry_point_imports_nothing_heavy() -> None:
    script = (
        "import sys, tokenyard.integrations.vllm.plugin\n"
        "heavy = {'torch', 'numpy', 'numba', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    found = [one for one in entry_points(group="vllm.general_plugins") if one.name == "tokenyard"]
    if not found:
        pytest.skip("this installation of tokenyard is older than the entry point")
    assert found[0].load() is plugin.register

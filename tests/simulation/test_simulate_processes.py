import subprocess
import sys

import pytest

from headrace.protocol.errors import ConfigurationError
from headrace.simulation.parallel import simulate_in_processes
from headrace.simulation.settings import SimulationSettings, TrafficSettings
from headrace.simulation.study import run_study

pytestmark = pytest.mark.slow


def test_the_command_needs_neither_load_client_nor_charts() -> None:
    """It is imported without the packages of the optional extras."""
    code = (
        "import sys; import headrace.cli.simulate; "
        "print([name for name in ('aiohttp', 'httpx', 'matplotlib', 'openvino') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_number_of_processes_changes_nothing() -> None:
    settings = SimulationSettings(traffic=TrafficSettings(num_requests=200, length_scale=0.1, load=1.2, seed=7))
    seen: set[str] = set()
    assert run_study(settings, None, lambda name, *_: seen.add(name), num_processes=4) == run_study(settings)
    assert seen == {"capacity", *settings.policies}


def test_an_error_in_a_process_is_the_caller_s() -> None:
    with pytest.raises(ConfigurationError, match="task 1"):
        simulate_in_processes(fail_in_the_second, 3, 2)


def fail_in_the_second(number: int, told: object) -> int:
    if number == 1:
        raise ConfigurationError(f"task {number}")
    return number

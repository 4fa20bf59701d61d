"""OpenVINO reports its own import to its maker and notes it in the user's home. Under Headrace it does neither."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

REPORT = """
import json, sys
import openvino.tools.ovc.telemetry_utils as reporting
print(json.dumps([reporting.tm.__name__, "openvino_telemetry.main" in sys.modules]))
"""


def report_after(imports, home):
    """What reports, in a process with a home of its own on no CI machine (where OpenVINO is silent by itself)."""
    kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [sys.executable, "-c", imports + REPORT],
        env=kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "module", ["executors.openvino_paged", "models.graph", "models.graph_store", "models.ir_folder", "launch.worker_child"]
)
def test_openvino_reports_nothing_and_writes_nothing(module, tmp_path):
    assert report_after(f"import headrace.{module}", tmp_path) == ["openvino.tools.ovc.telemetry_stub", False]
    assert list(tmp_path.iterdir()) == []

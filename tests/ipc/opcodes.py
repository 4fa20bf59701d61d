"""Stopping a piece of code before its n-th instruction, as a process is stopped that is killed there."""

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


class Killed(BaseException):
    pass


def dies_at(module: ModuleType, opcode_number: int, action: Callable[[], object]) -> bool:
    """Run the action, and stop it before its n-th instruction inside the module; whether it was stopped."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == opcode_number:
                raise Killed
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False

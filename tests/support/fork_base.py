# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs in forks of one process that has imported torch already, which saves seconds per program.

A *base* is a process that has imported torch, but not ``overlap_inductor``. In the base, no environment variable has
switched on torch's logs or loaded a device backend. ``ForkBase.run`` forks the base and runs a command line of Python
in the fork, in an environment that the caller gives. ``ForkBase.grown`` gives a base that has imported more, for
example Inductor.

In the fork, ``sys.modules`` first has no module of torch, as in a new interpreter. ``import torch`` puts the modules
back. Then it does what the last lines of ``torch/__init__.py`` do: it reads the environment and calls the entry points
of ``torch.backends``. Other modules that torch imports are there from the start.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from types import TracebackType
from typing import IO
from typing import Any

ROOT = Path(__file__).parents[2]
HASH_SEED = "1"
"""The hash seed of all programs. The process of the tests has another seed."""
TORCH = ("torch", "torch.distributed.fsdp", "sympy")
"""torch, and what ``import torch._inductor.config`` imports besides Inductor, Dynamo and Triton."""
DYNAMO = ("torch._dynamo",)
"""What a base imports in addition to ``TORCH``, for programs that import Inductor's configuration. This saves these
programs 0.8 s."""
INDUCTOR = ("tests.support.first_compile",)
"""What a base imports in addition to ``DYNAMO``, for programs that compile."""


class ForkBase:
    """A process that has imported ``modules``, and from which programs are forked. ``more`` has tuples of further
    modules. For each tuple, the latest process is forked, and the fork imports the tuple's modules. Programs are forked
    from the last fork."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.more: tuple[tuple[str, ...], ...] = ()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAP_INDUCTOR", "TORCH_LOGS"))}
        environment |= {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONHASHSEED": HASH_SEED}
        # The process gets its own session. So ``__exit__``, which kills the session's processes, also ends a program
        # that runs too long.
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def grown(self, modules: tuple[str, ...]) -> ForkBase:
        """A base that has also imported ``modules``. It ends when this base ends. While one of the two bases runs
        programs, the other base waits."""
        base = copy.copy(self)
        base.more = (*self.more, modules)
        return base

    def run(self, *arguments: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Like ``python ARGUMENTS``, which start with ``-c CODE``, ``-m MODULE`` or a script. Of the ``PYTHON*``
        variables in ``env``, only ``PYTHONPATH`` has an effect."""
        (done,) = self.run_at_once(*arguments, envs=[env], cwd=cwd)
        return done

    def run_at_once(
        self, *arguments: str, envs: Sequence[dict[str, str]], cwd: Path | None = None
    ) -> list[subprocess.CompletedProcess[str]]:
        """Like ``run``, but start one process for each environment in ``envs``. The processes run at the same time, as
        ranks do."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.ExitStack() as stack:
            folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in envs]
            programs = [
                {"arguments": arguments, "env": env, "cwd": str(cwd or os.getcwd()), "folder": folder}
                for env, folder in zip(envs, folders, strict=True)
            ]
            self.process.stdin.write(json.dumps([self.more, programs]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the base ended with exit status {self.process.wait()}")
            command = [sys.executable, *arguments]
            return [
                subprocess.CompletedProcess(
                    command, status, *(Path(folder, name).read_text() for name in ("stdout", "stderr"))
                )
                for status, folder in zip(json.loads(answer), folders, strict=True)
            ]

    def __enter__(self) -> ForkBase:
        return self

    def __exit__(self, *error: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


class _Torch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads torch by putting back the modules of the base."""

    def __init__(self) -> None:
        self.hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "torch"}
        self.spec = self.hidden["torch"].__spec__

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname == "torch" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.hidden["torch"]

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self.spec
        sys.modules.update(self.hidden)
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()
        if "TORCH_LOGS" in os.environ:
            module._logging._init_logs()


def _serve(modules: list[str]) -> dict[str, Any]:
    """Fork a process for each program of a request. In each fork, this function returns the fork's program. In the
    base, it does not return."""
    answers = os.dup(1)
    os.dup2(2, 1)
    _load(modules)
    requests: IO[str] = sys.stdin
    grown: dict[tuple[str, ...], IO[str]] = {}
    while line := requests.readline():
        names, programs = json.loads(line)
        if names:
            more = tuple(names[0])
            if more not in grown:
                ours, theirs = socket.socketpair()
                if not os.fork():
                    ours.close()
                    requests, answers, grown = theirs.makefile("r"), os.dup(theirs.fileno()), {}
                    _load(more)
                    continue
                theirs.close()
                grown[more] = ours.makefile("rw")
            grown[more].write(json.dumps([names[1:], programs]) + "\n")
            grown[more].flush()
            answer = grown[more].readline()
            if not answer:
                sys.exit(f"the base with {', '.join(more)} ended")
            os.write(answers, answer.encode())
            continue
        children = []
        for program in programs:
            if not (child := os.fork()):
                os.close(answers)
                return program
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.write(answers, f"{json.dumps(statuses)}\n".encode())
    sys.exit()


def _load(modules: Iterable[str]) -> None:
    """Import ``modules``. Garbage collections of forks do not visit the objects that the imports made."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _become(arguments: list[str], env: dict[str, str], cwd: str, folder: str) -> None:
    """Run the program in this process."""
    for number, name in enumerate(("stdout", "stderr"), 1):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = io.StringIO()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    ours = {"", os.getcwd(), str(ROOT), *sys.path[:1]}
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in ours)]
    importlib.invalidate_caches()
    for name in [*sys.modules]:
        if name.split(".")[0] == "tests":
            del sys.modules[name]
    sys.meta_path.insert(0, _Torch())
    sys.excepthook = _show_programs_frames
    kind = arguments[0]
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.path.insert(0, cwd)
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def _show_programs_frames(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without the frames of this module and of ``runpy``."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def end_process(error: BaseException | None) -> None:
    """End this process as the interpreter would after the program raised ``error``, or ended without an error
    (``None``). Torch's modules are not freed, which saves 0.2 s."""
    status: object = 0
    if isinstance(error, SystemExit):
        status = error.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(int(status or 0) & 0xFF)


if __name__ == "__main__":
    request = _serve(sys.argv[1:])
    try:
        _become(**request)
    except BaseException as error:  # noqa: BLE001
        end_process(error)
    end_process(None)

# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor bugreport``: pack a dump folder into one zip file that a user can send with a bug report.

The file holds the dump of every graph, tracebacks, versions and the doctor's checks, but no weights. The home folder
and the user's name are replaced.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from overlap_inductor.errors import OverlapError
from overlap_inductor.report.read_folder import graph_folders
from overlap_inductor.version import __version__

DEFAULT_FILE = "overlap_inductor_bugreport.zip"
PACKED = ("report.txt", "sites.json", "graph.before.txt", "graph.after.txt")
"""Files of a graph's folder that are packed. ``index.html`` shows the same content."""
PACKAGES = ("torch", "triton", "transformers", "accelerate", "numpy")
USER = "<user>"


def write_bug_report(folder: str, output: str | None = None) -> Path:
    """Pack the reports below ``folder`` into the file ``output`` (by default ``DEFAULT_FILE`` in the current folder).
    An older file of this name is replaced. Returns the path of the new file.

    Raises:
        OverlapError: there is no report below ``folder``, a file of a report cannot be read or is damaged, or
            ``output`` cannot be written.
    """
    hide = Redaction()
    files, errors = _reports(folder, hide)
    texts = {"versions.json": _json(versions()), "doctor.json": _json(_doctor()), **files}
    if errors:
        texts["tracebacks.txt"] = "\n".join(errors)
    path = Path(output or DEFAULT_FILE)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(name, hide(text))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OverlapError(f"{path} cannot be written ({error.strerror}); name another file with -o FILE") from error
    return path


class Redaction:
    """Replaces home folders by ``~`` and the user's name by ``<user>`` in a text. Home folders are ``home`` and the
    folders in ``/home`` and ``/Users``. ``home`` and ``user`` are by default this user's."""

    def __init__(self, home: str | None = None, user: str | None = None) -> None:
        place = Path(home) if home is not None else Path.home()
        name = _user_name() if user is None else user
        # A user without an entry in /etc/passwd has the root folder as home. Every path begins with the root folder,
        # so the root folder is not replaced.
        homes = sorted({str(p) for p in (place, place.resolve()) if len(p.parts) > 1}, key=len, reverse=True)
        parts = [re.escape(form) + r"(?![\w-]|\.\w)" for one in homes for form in _forms(one)]
        # The dump may come from another machine, so usual places of home folders are also replaced.
        parts.append(r"(?<![\w.-])/(?:home|Users)/(?:[^/\s\"'\\:,;)]|\\u[0-9a-f]{4})+")
        self._home = re.compile("|".join(parts))
        # "root" does not identify a person, and is a common word in code.
        names = _forms(name) if name not in ("", "root") else []
        self._user = re.compile("|".join(rf"(?<![^\W_]){re.escape(n)}(?![^\W_])" for n in names)) if names else None

    def __call__(self, text: str) -> str:
        text = self._home.sub("~", text)
        return self._user.sub(USER, text) if self._user is not None else text


def versions() -> dict[str, Any]:
    """Versions of the package, Python, the system, ``PACKAGES`` (``None`` if not installed), GPUs and driver."""
    from overlap_inductor.cli.doctor_machine import tool_output

    gpus = tool_output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    return {
        "overlap_inductor": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        "gpus": gpus.splitlines(),
    }


def _reports(folder: str, hide: Redaction) -> tuple[dict[str, str], list[str]]:
    """``({name in the archive: text} of each file, a text for each failure)``. ``hide`` is applied here to the
    names; the caller applies it to the texts."""
    files: dict[str, str] = {}
    errors: list[str] = []
    for found in graph_folders(folder):
        place = f"reports/{hide(found.prefix)}rank_{found.rank}/{hide(found.path.name)}"
        for name in PACKED:
            files[f"{place}/{name}"] = _read(found.path / name)
        try:
            failures = json.loads(files[f"{place}/sites.json"]).get("failures", [])
        except ValueError as error:
            raise OverlapError(f"{found.path / 'sites.json'} is not JSON ({error}); remove {found.path}") from error
        for failure in failures:
            of = f" of {', '.join(failure['sites'])}" if failure["sites"] else ""
            errors.append(f"{place}: the {failure['stage']}{of} failed\n{failure['traceback']}")
    return files, errors


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OverlapError(f"{file} cannot be read ({error}); remove {file.parent}, or write the dump again") from error


def _doctor() -> dict[str, Any]:
    from overlap_inductor.cli.doctor import collect
    from overlap_inductor.cli.doctor_checks import as_dict

    return as_dict(collect())


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _forms(text: str) -> list[str]:
    """``text`` as plain text, and as in JSON, which may escape letters."""
    return list(dict.fromkeys((text, json.dumps(text)[1:-1])))


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user number of the process has no name, as in some containers
        return ""

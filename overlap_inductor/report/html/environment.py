# SPDX-License-Identifier: Apache-2.0
"""Renders the templates of the pages with Jinja2. Every value is escaped. A name without a value raises an error."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from overlap_inductor.report import words
from overlap_inductor.report.advice import ADVICE

# The page may load nothing, even if a name in a graph contains markup.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
TONES = {"overlapped": "good", words.WOULD: "good", "kept": "wait", "refused": "warn", "failed": "bad"}
"""Status -> the CSS class that colours it."""


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("overlap_inductor.report.html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(advice=ADVICE, policy=POLICY, tones=TONES, words=words)
    return environment


def render(template: str, **values: Any) -> str:
    """The text of ``templates/<template>`` with ``values``. Values are plain text, and are escaped."""
    return _environment().get_template(template).render(**values)

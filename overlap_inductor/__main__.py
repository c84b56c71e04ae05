# SPDX-License-Identifier: Apache-2.0
"""``python -m overlap_inductor``: the same as the command ``overlap-inductor``."""

from __future__ import annotations

import sys

from overlap_inductor.cli.main import main

sys.exit(main())

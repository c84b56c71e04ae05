# SPDX-License-Identifier: Apache-2.0
"""Does one-time work of transformers in the process from which warm ranks are forked: the table that maps names of
stored weights to names of parameters. Each rank would compile its 1000 regular expressions."""

from __future__ import annotations

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")

# SPDX-License-Identifier: Apache-2.0
"""The parts that ``tools/make_docs.py`` writes into README and the pages of ``docs/``."""

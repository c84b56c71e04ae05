# SPDX-License-Identifier: Apache-2.0
"""What ``tools/make_docs.py`` writes into the pages of ``docs/``."""

# SPDX-License-Identifier: Apache-2.0
"""The pass, step by step: find sites, check, plan, rewrite. Imports nothing; import the modules you need."""

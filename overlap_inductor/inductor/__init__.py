# SPDX-License-Identifier: Apache-2.0
"""Where torch.compile calls this package: pass slots, wrapped functions of Inductor, calls of compiled graphs."""

# SPDX-License-Identifier: Apache-2.0
"""The places where torch.compile calls this package: the pass slot, wrapped functions of Inductor, and the call of a
compiled graph."""

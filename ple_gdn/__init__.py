"""ple_gdn: a torch.compile backend and op library for training Gated DeltaNet models.

Importing registers the ops `torch.ops.ple_gdn.*`; it patches nothing and touches no GPU.
"""

from __future__ import annotations

__version__ = "0.1.0"

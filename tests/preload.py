"""Imported once by the fork server, so that each rank of a test starts with everything loaded."""

import torch._dynamo  # noqa: F401 every optimizer imports it: a second for each rank

import shardwise.cli.job
import shardwise.cli.own_loop
import shardwise.report.progress
import shardwise.train.loop
import shardwise.verify.effects
import shardwise.verify.fit  # noqa: F401
from tests import families

for _name in families.FAMILIES:  # transformers loads each family's code when one is built
    families.family(_name, layers=1)

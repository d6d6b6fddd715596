"""A routing that was recorded: its file, its figures, and how they are shown.

file      what a recording holds, and how it is saved, loaded and joined
figures   loads, traffic, copies and imbalance, at any number of ranks and nodes
words     what a person should know of them, in sentences
report    all that is shown of a recording
picture   as a PNG, by matplotlib
page      as one HTML page that needs nothing else, with charts
notes     what a recording that is on holds in memory, with layer_names
"""

from __future__ import annotations

from tokenyard.observe.routing.file import LayerRouting as LayerRouting
from tokenyard.observe.routing.file import load as load

"""Cluster: where a recipe is trained.  Importable without torch."""

from weft.cluster._cluster import Cluster as Cluster
from weft.cluster._devices import find_kind as find_kind
from weft.cluster._devices import sold_bytes as sold_bytes
from weft.cluster._devices import table_links as table_links
from weft.cluster._known import KnownMachine as KnownMachine
from weft.cluster._known import keep_machine as keep_machine
from weft.cluster._known import known_machine as known_machine
from weft.cluster._links import Collective as Collective
from weft.cluster._links import CollectiveTime as CollectiveTime
from weft.cluster._links import LinkTier as LinkTier
from weft.cluster._links import Topology as Topology
from weft.cluster._load import dump_cluster as dump_cluster
from weft.cluster._load import load_cluster as load_cluster
from weft.cluster._load import parse_cluster as parse_cluster
from weft.cluster._load import resolve_cluster as resolve_cluster
from weft.cluster._measured import AttentionSpeed as AttentionSpeed
from weft.cluster._measured import BlockTime as BlockTime
from weft.cluster._measured import MatrixSpeed as MatrixSpeed
from weft.cluster._measured import Measured as Measured
from weft.cluster._measured import MemorySpeed as MemorySpeed
from weft.cluster._parts import Devices as Devices
from weft.cluster._parts import Node as Node
from weft.cluster._spec import parse_cluster_spec as parse_cluster_spec
from weft.cluster._table import ALIASES as ALIASES
from weft.cluster._table import DEVICES as DEVICES
from weft.cluster._table import DeviceKind as DeviceKind

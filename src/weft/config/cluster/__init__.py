"""The cluster: nodes, devices and links, measured or declared.  No torch."""

from weft.config.cluster._cluster import Cluster as Cluster
from weft.config.cluster._devices import find_kind as find_kind
from weft.config.cluster._devices import sold_bytes as sold_bytes
from weft.config.cluster._devices import table_links as table_links
from weft.config.cluster._known import KnownMachine as KnownMachine
from weft.config.cluster._known import keep_machine as keep_machine
from weft.config.cluster._known import known_machine as known_machine
from weft.config.cluster._links import Collective as Collective
from weft.config.cluster._links import CollectiveTime as CollectiveTime
from weft.config.cluster._links import LinkTier as LinkTier
from weft.config.cluster._links import Topology as Topology
from weft.config.cluster._load import dump_cluster as dump_cluster
from weft.config.cluster._load import load_cluster as load_cluster
from weft.config.cluster._load import parse_cluster as parse_cluster
from weft.config.cluster._load import resolve_cluster as resolve_cluster
from weft.config.cluster._measured import AttentionSpeed as AttentionSpeed
from weft.config.cluster._measured import BlockTime as BlockTime
from weft.config.cluster._measured import MatrixSpeed as MatrixSpeed
from weft.config.cluster._measured import Measured as Measured
from weft.config.cluster._measured import MemorySpeed as MemorySpeed
from weft.config.cluster._parts import Devices as Devices
from weft.config.cluster._parts import Node as Node
from weft.config.cluster._spec import parse_cluster_spec as parse_cluster_spec
from weft.config.cluster._table import ALIASES as ALIASES
from weft.config.cluster._table import DEVICES as DEVICES
from weft.config.cluster._table import DeviceKind as DeviceKind

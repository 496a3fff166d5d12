"""Cluster: where a recipe is trained.  Importable without torch."""

from weft.cluster._cluster import Cluster as Cluster
from weft.cluster._devices import DEVICES as DEVICES
from weft.cluster._devices import DeviceKind as DeviceKind
from weft.cluster._load import dump_cluster as dump_cluster
from weft.cluster._load import load_cluster as load_cluster
from weft.cluster._load import parse_cluster as parse_cluster
from weft.cluster._load import resolve_cluster as resolve_cluster
from weft.cluster._parts import Devices as Devices
from weft.cluster._parts import LinkTier as LinkTier
from weft.cluster._parts import Node as Node
from weft.cluster._spec import parse_cluster_spec as parse_cluster_spec

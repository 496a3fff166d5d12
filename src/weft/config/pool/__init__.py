"""Pools: machines, and the place that starts programs on them."""

from weft.config.pool._kubernetes import ClaimedVolume as ClaimedVolume
from weft.config.pool._kubernetes import KubernetesSettings as KubernetesSettings
from weft.config.pool._pool import MpiSettings as MpiSettings
from weft.config.pool._pool import PlaceName as PlaceName
from weft.config.pool._pool import Pool as Pool
from weft.config.pool._pool import PoolHost as PoolHost
from weft.config.pool._pool import SlurmSettings as SlurmSettings
from weft.config.pool._pool import SshSettings as SshSettings
from weft.config.pool._ray import RaySettings as RaySettings
from weft.config.pool._read import all_pools as all_pools
from weft.config.pool._read import find_pool as find_pool
from weft.config.pool._read import load_pool as load_pool
from weft.config.pool._read import parse_pool as parse_pool

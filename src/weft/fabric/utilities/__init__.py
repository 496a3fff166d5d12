"""Small functions under the names that Fabric's scripts import."""

from weft.fabric._absent import absent
from weft.fabric.utilities.rank_zero import rank_zero_info as rank_zero_info
from weft.fabric.utilities.rank_zero import rank_zero_only as rank_zero_only
from weft.fabric.utilities.rank_zero import rank_zero_warn as rank_zero_warn
from weft.fabric.utilities.seed import seed_everything as seed_everything

__getattr__ = absent(
    __name__,
    {
        "Use fabric.to_device.": "move_data_to_device",
        "Use rank_zero_warn.": "rank_zero_deprecation disable_possible_user_warnings",
        "Use torch.utils.flop_counter; the run's record has samples per second.": "measure_flops Throughput"
        " ThroughputMonitor",
        "Divide the cores by the ranks of a host.": "suggested_max_num_workers",
        "Write what ranks read under fabric.rank_zero_first(local=True).": "is_shared_filesystem",
        "Use enum.StrEnum.": "LightningEnum",
        "Use types.SimpleNamespace.": "AttributeDict",
    },
)

"""What is wrong with a machine, or with a run, and what to change: `weft doctor`."""

from weft.watch.doctor.cluster_file import check_cluster as check_cluster
from weft.watch.doctor.findings import examine_run as examine_run
from weft.watch.doctor.machine import MachineCheck as MachineCheck
from weft.watch.doctor.machine import check_machine as check_machine
from weft.watch.doctor.run_case import RunCase as RunCase
from weft.watch.doctor.run_case import hosts_of as hosts_of

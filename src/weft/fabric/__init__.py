"""Lightning Fabric's face on `weft.session`: `from weft.fabric import Fabric`, and the script stays as it is."""

from weft.fabric.fabric import Fabric as Fabric
from weft.fabric.utilities.seed import seed_everything as seed_everything
from weft.fabric.wrappers import is_wrapped as is_wrapped

"""Scripts of other libraries as scripts of a session, by their text alone."""

from weft.migrate.script._migrate import MigratedScript as MigratedScript
from weft.migrate.script._migrate import migrate_script as migrate_script

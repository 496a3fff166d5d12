"""Published: other people's measured runs, predicted row by row, and what is learnt from them.  Without torch."""

from weft.published._accuracy import Accuracy as Accuracy
from weft.published._accuracy import accuracy as accuracy
from weft.published._accuracy import accuracy_of as accuracy_of
from weft.published._fit import Fit as Fit
from weft.published._fit import Sample as Sample
from weft.published._fit import fit as fit
from weft.published._knowledge import Knowledge as Knowledge
from weft.published._knowledge import StackScalar as StackScalar
from weft.published._knowledge import datasheet_knowledge as datasheet_knowledge
from weft.published._knowledge import dump_knowledge as dump_knowledge
from weft.published._knowledge import fitted_knowledge as fitted_knowledge
from weft.published._report import Report as Report
from weft.published._report import report_of as report_of
from weft.published._rows import MEASURED_COLUMNS as MEASURED_COLUMNS
from weft.published._rows import PUBLISHED_RUNS as PUBLISHED_RUNS
from weft.published._rows import RUN_COLUMNS as RUN_COLUMNS
from weft.published._rows import Measured as Measured
from weft.published._rows import Row as Row
from weft.published._rows import Run as Run
from weft.published._rows import read_rows as read_rows
from weft.published._validate import Mode as Mode
from weft.published._validate import Validation as Validation
from weft.published._validate import dump_forecasts as dump_forecasts
from weft.published._validate import predictable_samples as predictable_samples
from weft.published._validate import validate as validate

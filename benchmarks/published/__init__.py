"""Published: other people's measured runs, predicted row by row, and what is learnt from them.  Without torch."""

from benchmarks.published._accuracy import accuracy_of as accuracy_of
from benchmarks.published._accuracy import dump_accuracy as dump_accuracy
from benchmarks.published._fit import Fit as Fit
from benchmarks.published._fit import Sample as Sample
from benchmarks.published._fit import fit as fit
from benchmarks.published._knowledge import Knowledge as Knowledge
from benchmarks.published._knowledge import StackScalar as StackScalar
from benchmarks.published._knowledge import datasheet_knowledge as datasheet_knowledge
from benchmarks.published._knowledge import dump_knowledge as dump_knowledge
from benchmarks.published._knowledge import fitted_knowledge as fitted_knowledge
from benchmarks.published._report import Report as Report
from benchmarks.published._report import report_of as report_of
from benchmarks.published._rows import MEASURED_COLUMNS as MEASURED_COLUMNS
from benchmarks.published._rows import PUBLISHED_RUNS as PUBLISHED_RUNS
from benchmarks.published._rows import RUN_COLUMNS as RUN_COLUMNS
from benchmarks.published._rows import Measured as Measured
from benchmarks.published._rows import Row as Row
from benchmarks.published._rows import Run as Run
from benchmarks.published._rows import read_rows as read_rows
from benchmarks.published._show import show as show
from benchmarks.published._validate import Mode as Mode
from benchmarks.published._validate import Validation as Validation
from benchmarks.published._validate import dump_forecasts as dump_forecasts
from benchmarks.published._validate import predictable_samples as predictable_samples
from benchmarks.published._validate import validate as validate

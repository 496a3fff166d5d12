"""Why a row gets no prediction."""


class Unpredictable(Exception):  # noqa: N818 - no fault of anyone: the reason is data, and stands in the report
    """A row does not say what a prediction needs.  Its text is the reason."""

"""What all reports share: the base class, the document between a report and its text or HTML, plots and units."""

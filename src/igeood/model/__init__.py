"""Running a classifier: batches in, outputs out, the input step between; the model is left as found."""

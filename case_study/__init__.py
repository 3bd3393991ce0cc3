"""The case study: main job, demo, continuous runner, played sources, input data and reports."""

"""The case study: main job, demo, continuous runner, the sources it plays and its reports."""

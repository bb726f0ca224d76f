"""Runs many trials: sweeps, searches and tunes are one loop, `study.Study`.

    sweep.py  search/  tune/               one command each: what is proposed, what is shown at the end
    bench.py                               two commits in turns, as whole runs
    request.py  study.py                   what sweep and search share
    points/                                what is run
    executors/                             runs trials: here, or by a launcher of Hydra's
    trial_end.py  rows.py                  what became of a trial: its folder is its row
    study_files.py  ranking/  board/       reads a study's folder, ranks it, shows it

Start at `study`.
"""

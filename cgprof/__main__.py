"""`python -m cgprof` is the console script, and what a launcher starts as a rank."""

from cgprof.parallel.launched import follow_launcher


def run() -> None:
    """Ties a started rank to its launcher before anything heavy is loaded."""
    follow_launcher()
    from cgprof.cli.app import main

    main()


if __name__ == "__main__":
    run()

from atoll.cli import main

main()

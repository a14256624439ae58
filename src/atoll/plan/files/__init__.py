"""Files that problems come from: fleet files, clusters in them, and other systems' formats.

Begin with `fleet_file.load_fleet`: from the YAML that a person writes to a `Problem`.

    fleet_schema, class_schema, choice_schema, schema_fields
                               keys that a person may write, with their limits
    fleet_file, offers_file, cluster_file, classes_file, fleet_choices
                               what is written, turned into services, offers, machines, classes, choices
    read                       a fleet file, problem.json or plan.json, told apart by its content; placements
    fleet_text, examples       a problem written as a fleet file; examples that come with Atoll
    helix                      files of the Helix repository

May import `plan`, `perf`, `engines`, `workload`, `catalog` and `core`.
"""

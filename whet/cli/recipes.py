"""``whet recipes``: the recipes that come with the package."""

from whet.cli.words import AsJson, print_json


def recipes(as_json: AsJson = False) -> None:
    """List the recipes, each with what it does."""
    from whet.config import list_recipes

    found = list_recipes()
    if as_json:
        print_json(found)
        return
    width = max(map(len, found), default=0)
    for name, description in found.items():
        print(f"{name:<{width}}  {description}".rstrip())

"""``whet recipes``: lists the recipes that come with the package."""

from whet.cli.arguments import AsJson, print_json


def recipes(as_json: AsJson = False) -> None:
    """List the recipes with their descriptions."""
    from whet.config import list_recipes

    descriptions = list_recipes()
    if as_json:
        print_json(descriptions)
        return
    width = max(map(len, descriptions), default=0)
    for name, description in descriptions.items():
        print(f"{name:<{width}}  {description}".rstrip())

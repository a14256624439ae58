"""How members reach each other: `fabric` drives the registry over `link`; `hub` is what others dial."""

"""Why a plan is what it is: `explain` plans again to answer; `explanation` holds the words."""

"""`weft chaos`: real runs of a recipe in which seeded faults come, and a judge of what becomes of them."""

from weft.api.chaos.campaign import Campaign as Campaign
from weft.api.chaos.campaign import CampaignResult as CampaignResult
from weft.api.chaos.cases import KINDS as KINDS
from weft.api.chaos.cases import chosen_kinds as chosen_kinds

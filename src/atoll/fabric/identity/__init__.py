"""Who is who in a fabric: certificates, the authority that issues them, a way in, what is believed."""

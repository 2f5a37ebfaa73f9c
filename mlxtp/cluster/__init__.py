"""Who is here and who does what. Pure, except what looks at the network and at this machine."""

"""SGLang servers: started here, supervised, or found where somebody else started them."""

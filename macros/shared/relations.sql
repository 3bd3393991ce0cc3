{#-
    Relations, what the catalog knows of them, and Delta's own facts: version and properties.

    `relation_of` and `relation_beside` keep all three parts of a name: on an adapter with catalogs a relation that is
    built from schema and identifier alone is another table.
-#}

{% macro relation_of(node, type=none) %}
    {#- The relation of a node of dbt's graph: a model, a snapshot, a seed or a source. -#}
    {{ return(api.Relation.create(
        database=node.database, schema=node.schema, identifier=node.identifier or node.alias, type=type
    )) }}
{% endmacro %}


{% macro existing_of(node) %}
    {#- The relation of a node as dbt's cache knows it, or none. -#}
    {{ return(adapter.get_relation(node.database, node.schema, node.identifier or node.alias)) }}
{% endmacro %}


{% macro relation_beside(relation, suffix, type='table') %}
    {#- A relation of the same schema, named after this one: `<name><suffix>`. -#}
    {{ return(relation.incorporate(path={'identifier': relation.identifier ~ suffix}, type=type)) }}
{% endmacro %}


{% macro batch_view(relation) %}
    {#-
        The temporary view of a model's SQL. Its name has the schema: a temporary view belongs to the session, in which
        models of one name in two schemas may be built at the same time.
    -#}
    {{ return(
        relation.incorporate(path={'identifier': relation.schema ~ '__' ~ relation.identifier ~ '__dbt_tmp'}).include(
            database=false, schema=false
        )
    ) }}
{% endmacro %}


{% macro unlimited(relation) %}
    {#-
        With `--empty` dbt renders `ref` as a subquery without rows, and with `--sample` or in a microbatch as one with
        the rows of a time window: nothing can describe these.
    -#}
    {%- if relation is string or (relation.limit is none and not relation.event_time_filter) -%}
        {{ return(relation) }}
    {%- endif -%}
    {{ return(relation.replace(limit=none, event_time_filter=none)) }}
{% endmacro %}


{% macro model_of(model_name, materialization, what) %}
    {#- The node of a model that an operation names. -#}
    {%- set nodes = graph.nodes.values()
        | selectattr('resource_type', 'equalto', 'model') | selectattr('name', 'equalto', model_name) | list -%}
    {%- do lakehouse_patterns.require(
        nodes and nodes[0].config.materialized == materialization,
        what ~ " a model with materialized='" ~ materialization ~ "', got '" ~ model_name ~ "'"
    ) -%}
    {{ return(nodes[0]) }}
{% endmacro %}


{% macro names_like(relation) %}
    {#- The relations of the catalog named `<name>_…`, by name; dbt's cache lacks the ones that our statements created. -#}
    {%- set found, prefix = {}, relation.identifier ~ '_' -%}
    {%- set like = lakehouse_patterns.text_literal(prefix ~ '*') -%}
    {%- for name in run_query(
        'show tables in ' ~ relation.without_identifier() ~ ' like ' ~ like
    ).columns[1].values() | sort if name | lower | length > prefix | length -%}
        {%- do found.update({
            name[prefix | length:]: relation.incorporate(path={'identifier': name}, type='table')
        }) -%}
    {%- endfor -%}
    {{ return(found) }}
{% endmacro %}


{% macro is_in_catalog(relation) %}
    {#- Asked of the catalog itself. -#}
    {{ return(run_query(
        'show tables in ' ~ relation.without_identifier() ~ ' like '
        ~ lakehouse_patterns.text_literal(relation.identifier)
    ).rows | length > 0) }}
{% endmacro %}


{% macro table_properties(relation) %}
    {%- set properties = {} -%}
    {%- for property in run_query('show tblproperties ' ~ relation).rows -%}
        {%- do properties.update({property[0]: property[1]}) -%}
    {%- endfor -%}
    {{ return(properties) }}
{% endmacro %}


{% macro table_property(relation, name) %}
    {#- The property's value, or none; for an absent property Spark itself would return a sentence as its value. -#}
    {{ return(lakehouse_patterns.table_properties(relation).get(name)) }}
{% endmacro %}


{% macro latest_version(relation) %}
    {{ return(run_query('describe history ' ~ lakehouse_patterns.unlimited(relation) ~ ' limit 1').rows[0]['version']) }}
{% endmacro %}


{% macro table_detail(relation) %}
    {{ return(run_query('describe detail ' ~ lakehouse_patterns.unlimited(relation)).rows[0]) }}
{% endmacro %}
